"""Which models belong together: clusterings of peers by the models they trained (ODCL)."""
