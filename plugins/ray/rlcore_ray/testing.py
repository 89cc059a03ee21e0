"""The mark of tests that need Ray; for pytest."""

from rlcore.testing.marks import needs

NEEDS_RAY = needs("ray", "`pip install ray`")
