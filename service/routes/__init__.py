"""The routes, a file for each noun; `service.app` puts them together."""
