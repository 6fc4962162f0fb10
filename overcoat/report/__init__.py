"""`overcoat report`: one or several runs as a page to look at."""
