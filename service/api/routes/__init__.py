"""The routes, a file for each noun; `service.api.app` puts them together."""
