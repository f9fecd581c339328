"""Conversions between specs: each move fits one layer's weights to another spec. A file a method."""
