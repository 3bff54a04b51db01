"""The dimension key: one letter, one meaning, everywhere in this repository.

Arrays carry their shape as a suffix where it helps (``q_BTHK``), and none where a function works on any shape.

====== ===============================================================
B      batch (rows; a row may hold several packed documents)
T      time: tokens of a row
D      model width
H      attention head
K, V   key width and value width of one head
R      low rank (query or key-value compression, gate bottleneck)
L      width that an expert works in: the latent width, or D without a latent
E, A   routed experts, and experts active for one token
F      feed-forward width
S      source of a depth mixture (attention residuals)
W      vocabulary
C      chunk length of a scan over time
N      document, or any flattened list of tokens
====== ===============================================================

``segment_ids`` [B, T] int32 give each token's document, not decreasing along T; ``-1`` marks padding, which changes no
state, is attended to by nothing, and counts in no loss and no statistic. ``None`` means one document per row.
"""

PADDING_SEGMENT = -1
