"""Bytes on disk to arrays and back; nothing statistical."""
