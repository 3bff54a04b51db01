"""One module for each engine: from a spec to what the engine takes."""
