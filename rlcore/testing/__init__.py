"""The core's test kit for plugin authors: fakes and conformance checks."""
