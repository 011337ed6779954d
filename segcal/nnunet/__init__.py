"""nnU-Net at the edge: its folders read without it, its predictor wrapped where it is installed.

Importing this package imports nothing of nnU-Net. `postprocess` and `collect` work on files alone and need no nnunetv2;
`export` and `predict` need the extra `nnunet` and import it when they run.
"""
