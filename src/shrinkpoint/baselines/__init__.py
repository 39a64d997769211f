"""Published methods that the library is compared with: QD+, CNR+, GOBO+ and ExCP."""
