"""Where sealed files are: a folder, or a repository on the Hub."""
