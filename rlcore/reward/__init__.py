"""The core's own reward manager: functions, scored where they run."""
