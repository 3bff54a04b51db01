"""Token ids from a file."""

import os

import numpy as np


def read_ids(path: str | os.PathLike) -> np.ndarray:
    """The array of a ``.npy`` file, of any dtype but objects: a pickle is never opened.

    Raises:
      OSError: the file cannot be opened. ValueError: it is no complete ``.npy`` file; the message names it.
    """
    with open(path, "rb") as file:
        try:
            return np.lib.format.read_array(file, allow_pickle=False)
        except ValueError as error:
            raise ValueError(f"{path} is not a .npy file of token ids: {error}") from error
