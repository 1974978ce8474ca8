//! Host memory: mapped files.
