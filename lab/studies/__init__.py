"""Studies that documents quote, a folder each: `run.py` measures, `table.py` writes the tables of documents."""
