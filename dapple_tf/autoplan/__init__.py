"""Turn a user's options into a plan. One file decides each option that may be left to "auto".

==========================  ==========================================================================
option                      file
==========================  ==========================================================================
``stages="auto"``           ``stages_auto``: profile the model, run planner "best"
``stages=2``, ``["a"]``     ``stages_requested``: cut where the user says, or balance estimated work
``micro_batches=[2, 4]``    ``options``: the samples, or the share, of each micro-batch
``micro_batches="auto"``    ``autoplan``: profile the model, simulate each M
``schedule="auto"``         ``schedule_auto``: simulate each policy; ``schedule_estimated`` without a profile
``recompute=...``           ``recompute_option``: layers that backward computes again
a smaller batch             ``batch_fit``: fewer micro-batches and replicas
==========================  ==========================================================================

``autoplan.Autoplan`` is the entry: it takes the ``options.Options`` and keeps the ``decision.PlanDecision``.
"""
