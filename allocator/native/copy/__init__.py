"""Copies between GPU and host memory: the streams and events of a lane, in one call of C++ for a group of copies."""
