"""The settings files of the pipelines, as package data; `segcal.settings.load_settings` reads them by name."""
