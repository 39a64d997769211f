"""Quantizers: values to codes, one method a file, and the statistics that they need. Loss happens here or nowhere."""
