"""`overcoat report`: one or several runs as an HTML page."""
