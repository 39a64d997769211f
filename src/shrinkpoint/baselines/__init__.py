"""Published methods that the library is compared with: QD+, CNR+, GOBO+, LC-Checkpoint, SCAR, TOPN and ExCP."""
