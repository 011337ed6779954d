"""The pages: what people see of the service. Server-rendered, with little JavaScript of their own.

router.py       all routes
overview.py, case_list.py, case_page.py, job_pages.py, calibrator_pages.py    one page, or two, each
slices.py       slices drawn by the server, from the layers that jobs write (view.py, layers.py)
trend.py, reliability.py    drawings as coordinates; the templates make SVG of them
render.py, wording.py       how a page is answered with, how numbers are written
build_viewer.py brings NiiVue into static/, for those who want volumes in the browser
"""
