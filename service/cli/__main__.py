"""`python -m service.cli`: how a parent process starts a worker with its own interpreter."""

from service.cli import main

if __name__ == "__main__":
    main()
