"""The commands of ``dapple``, one file each, and what they share.

``options`` and ``parameter_types`` parse options; ``model_loading`` loads a MODEL; ``startup``
starts TensorFlow; ``output`` prints results. ``train`` runs ``training_run``, whose loop is ``training_loop``.
A command imports TensorFlow inside its function, so that help and wrong usage are answered at once.
"""
