"""What every front does with jobs: the HTTP routes, the command line and whoever else submits them."""
