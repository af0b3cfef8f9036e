"""`python -m trinity_es` runs the command `trinity-es`, also if that is not on the PATH."""

from trinity_es.cli import main

if __name__ == "__main__":
    main()
