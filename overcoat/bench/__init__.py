"""`overcoat bench`: this project and its peers, measured in one run on one GPU."""
