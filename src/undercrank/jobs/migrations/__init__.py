"""How the tables of `jobs` came to be, one file a step; `Store.open` runs what is missing. Older files never change."""
