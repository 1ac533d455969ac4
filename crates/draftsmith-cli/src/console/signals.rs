//! Listens for the signals that ask a job to stop: Ctrl-C on every system, SIGTERM and SIGHUP on
//! Unix.

#[cfg(unix)]
mod by_system {
    use std::io::Result;
    use std::sync::Arc;
    use std::thread::Builder;

    use nix::sys::signal::{SigHandler, Signal, signal};
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
    use signal_hook::flag;
    use signal_hook::iterator::Signals;

    /// Ctrl-C's signal number.
    pub(crate) const INTERRUPT: u8 = SIGINT as u8;

    /// Calls `on_signal` with the number of each signal, on a separate thread. A limit of file sizes
    /// no longer ends the process, so that the write fails with an error.
    pub(crate) fn listen(on_signal: impl Fn(u8) + Send + 'static) -> Result<()> {
        flag::register(SIGXFSZ, Arc::default())?;
        let mut numbers = vec![SIGINT, SIGTERM];
        if !is_hangup_ignored() {
            numbers.push(SIGHUP);
        }
        let mut signals = Signals::new(numbers)?;
        Builder::new().name("signals".to_owned()).spawn(move || {
            for number in signals.forever() {
                on_signal(u8::try_from(number).expect("one of the three above"));
            }
        })?;
        Ok(())
    }

    /// Returns whether SIGHUP was ignored when the process started, as under `nohup`, so that the
    /// process should outlive its terminal. Otherwise SIGHUP stays ignored only until the listener
    /// handles it.
    #[expect(unsafe_code, reason = "a signal's disposition can only be read by setting it")]
    fn is_hangup_ignored() -> bool {
        // SAFETY: ignoring a signal installs no handler that could run.
        let before = unsafe { signal(Signal::SIGHUP, SigHandler::SigIgn) };
        matches!(before, Ok(SigHandler::SigIgn))
    }
}

#[cfg(not(unix))]
mod by_system {
    use std::io::{Error, Result};

    /// The number of SIGINT on Unix, from which the exit code is computed.
    pub(crate) const INTERRUPT: u8 = 2;

    /// Calls `on_signal` after each Ctrl-C, on a separate thread.
    pub(crate) fn listen(on_signal: impl Fn(u8) + Send + 'static) -> Result<()> {
        ctrlc::set_handler(move || on_signal(INTERRUPT)).map_err(Error::other)
    }
}

pub(super) use by_system::{INTERRUPT, listen};
