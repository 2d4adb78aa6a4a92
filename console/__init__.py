"""The command line and, later, the web page."""
