"""Encodes the tensors of one record to bytes, and decodes them.

`recipe` describes how a record was encoded, and `coder` lays its tensors out as one array of numbers and entropy-codes
that with the native core. `codebook_tensor` and `lattice` describe quantized tensors; `record`, `codebook_record`,
`lattice_record` and `lattice_decoder` hold the encoders and decoders of the kinds of record, with the interface in
`decoder`.
"""
