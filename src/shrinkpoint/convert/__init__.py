"""WHAT OTHERS WROTE: torch and safetensors files, directories of DCP and of frameworks, whole runs; in and out.

`run.find` says what there is at a path, `into.Importer` puts it into a store one checkpoint at a time, `back.write`
writes
one as it was. No framework is imported, and nothing that a file holds is run.
"""
