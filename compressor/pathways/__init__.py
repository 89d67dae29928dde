"""C3PO: the experts that tokens are routed to, changed at test time, or for good by a bias of the
routers.

"C3PO: Critical-Layer, Core-Expert, Collaborative Pathway Optimization for Test-Time Expert
Re-Mixing" (arXiv:2504.07964).

- `reference.py`: the set of items that a model answers right, with embeddings and pathways, and the
  nearest ones;
- `engine.py`: the critical layers, run again with other router logits;
- `optimisers.py`: mode finding, kernel regression and neighbourhood gradient descent, on the core
  experts;
- `answering.py`: a question answered on its optimised pathway; `lm_eval_model.py`: the same for
  lm-eval;
- `average.py`: the mean of optimised pathways, which the step `routers` takes as a bias;
- `options.py` has the options, `command.py` the command `reference`.
"""
