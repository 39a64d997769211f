"""From a quantized state to records, exactly: which tensors share a record, their contexts and their coders."""
