"""The stages of dvc.yaml: ``python -m stages.NAME``, each a short script over the library in ``pipeline/``."""
