"""The text backbone of Kimi K3: components in their own files, composed in block.py and transformer.py."""
