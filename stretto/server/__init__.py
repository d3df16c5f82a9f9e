"""The HTTP server, one file an endpoint, and the page to try sizes on."""
