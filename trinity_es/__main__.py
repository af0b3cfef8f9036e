"""`python -m trinity_es`: the command `trinity-es` when it is not on the path."""

from trinity_es.cli import main

if __name__ == "__main__":
    main()
