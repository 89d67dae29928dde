"""Routing attribution: the influence of every earlier component on every router.

"Understanding Cross-Layer Contributions to Mixture-of-Experts Routing in LLMs" (ICLR 2026). A
router's logits are the product of its rows and the normalised residual stream, which is a sum over
components: so they are sums of sub-scores.

In the order of the paper:

- `tracing.py`: what a layer adds to the stream, traced through its own forward with frozen
  statistics of norms;
- `routers.py`: the first pass keeps each router's logits, choices and rows on the stream before it;
- `blocking.py`: routers that may not choose some experts;
- `projecting.py`: the second pass projects each component onto all later routers: variance, APS,
  ANS, AARV, covariance;
- `measure.py`: both passes as one function, and heads split by key token in a third;
- `figures.py`: the results; `hubs.py`: outliers among them, and super experts; `graph.py`: the
  graph and centralities;
- `report.py`, `pictures.py`: files and pictures; `command.py`, `api.py`, `protectors.py`: what
  entry points announce.
"""
