"""`python -m trinity_es.cli`: the command `trinity-es` where it is not installed."""

from trinity_es.cli import main

if __name__ == "__main__":
    main()
