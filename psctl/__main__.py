"""`python -m psctl`: the command line."""

from psctl.cli.main import main

if __name__ == "__main__":
    main()
