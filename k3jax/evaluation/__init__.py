"""What a trained model can do: bits per byte of held-out text by source, accuracy of generated tasks by cell."""

from k3jax.evaluation.accuracy import chance, measure
from k3jax.evaluation.predict import Predict, bits_per_byte, predictor

__all__ = ["Predict", "bits_per_byte", "chance", "measure", "predictor"]
