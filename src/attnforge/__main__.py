"""The command `attnforge`, also as `python -m attnforge`: nothing is loaded before an error can be said in words."""

from __future__ import annotations

import sys


def main() -> None:
    """What the command runs; a package that is missing or broken, and an interrupt, need no traceback."""
    try:
        from .cli import main as run
    except KeyboardInterrupt:
        raise SystemExit(130) from None  # 128 + SIGINT, as shells count
    except ImportError as error:
        sys.stderr.write(f"error: attnforge cannot start: {error}; `pip install attnforge` brings what it needs\n")
        raise SystemExit(1) from None
    run()


if __name__ == "__main__":
    main()
