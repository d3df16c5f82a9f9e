"""The functions behind the commands, and the public Python API."""
