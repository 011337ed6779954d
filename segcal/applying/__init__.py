"""Writing calibrated maps: numbers as they are stored, files of a case, the record of a run."""
