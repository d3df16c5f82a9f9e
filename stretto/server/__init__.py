"""The HTTP server, one file per endpoint, and the web page."""
