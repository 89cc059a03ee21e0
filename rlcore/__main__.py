"""`python -m rlcore` is `rlcore`."""

import sys


def main() -> int:
    """Run the command; Ctrl-C while its modules are imported is one line and 130, as later."""
    try:
        from rlcore.cli import main as command
    except KeyboardInterrupt:
        sys.stderr.write("rlcore: interrupted\n")
        return 130
    return command()


if __name__ == "__main__":
    sys.exit(main())
