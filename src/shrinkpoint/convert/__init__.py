"""Conversion of checkpoints that others wrote: torch and safetensors files, directories of DCP and of frameworks, runs.

`discover.discover` finds what a path holds, `import_.Importer` puts it into a store one checkpoint at a time,
`export.write_checkpoint` writes a checkpoint in the form that it had, or in another one. No framework is imported, and
nothing that a file holds is run.
"""
