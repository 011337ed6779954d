"""All pages of the service in one router; the gate in front of them knows who may see what."""

from __future__ import annotations

from fastapi import APIRouter

from segcal.qa.settings import load_qa_settings
from segcal.service.files import ServiceFiles
from segcal.service.settings import ServiceSettings
from segcal.service.store import Store
from segcal.service.web.calibrator_pages import calibrator_routes
from segcal.service.web.case_list import case_list_routes
from segcal.service.web.case_page import case_page_routes
from segcal.service.web.job_pages import job_routes
from segcal.service.web.overview import overview_routes
from segcal.service.web.static import static_routes


def router(settings: ServiceSettings, store: Store) -> APIRouter:
    """The pages and what they load.

    The limits they draw are the shipped ones of `segcal qa`, which the jobs flag cases by.
    """
    files, limits = ServiceFiles(settings.data), load_qa_settings()
    pages = APIRouter(include_in_schema=False)
    pages.include_router(overview_routes(settings, store, limits))
    pages.include_router(case_list_routes(store))
    pages.include_router(case_page_routes(store, files, limits))
    pages.include_router(job_routes(store, files))
    pages.include_router(calibrator_routes(settings, store))
    pages.include_router(static_routes())
    return pages
