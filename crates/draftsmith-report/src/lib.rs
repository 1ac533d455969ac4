//! Results of measurements: their files, terminal tables and HTML pages.
