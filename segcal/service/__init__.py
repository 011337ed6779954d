"""The service behind `segcal serve`: predictions come in, calibrated maps and QA come out, people look at a page.

    api/        REST under /v1, who may do what, and the pages' routes
    web/        the pages: templates, own JavaScript, slices drawn by the server
    store/      what is durable: jobs, cases, calibrators, tokens, outputs seen (SQLite or PostgreSQL)
    work/       what one job does, in a child process that knows no database
    worker.py   takes jobs from the store, hands them to its child, keeps the lease
    watch.py    turns every finished nnU-Net output of a folder into one job

Nothing of it is imported by the core.
"""
