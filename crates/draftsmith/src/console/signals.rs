//! The signals that ask a job to stop: Ctrl-C, and where there are such, SIGTERM and SIGHUP.

#[cfg(unix)]
mod by_system {
    use std::io::Result;
    use std::thread::Builder;

    use nix::sys::signal::{SigHandler, Signal, signal};
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    use signal_hook::iterator::Signals;

    /// The number of Ctrl-C's signal.
    pub(crate) const INTERRUPT: u8 = SIGINT as u8;

    /// Calls `asked` with the number of each signal, on a thread of its own.
    pub(crate) fn listen(asked: impl Fn(u8) + Send + 'static) -> Result<()> {
        let mut numbers = vec![SIGINT, SIGTERM];
        if !is_hangup_ignored() {
            numbers.push(SIGHUP);
        }
        let mut signals = Signals::new(numbers)?;
        Builder::new().name("signals".to_owned()).spawn(move || {
            for number in signals.forever() {
                asked(u8::try_from(number).expect("one of the three above"));
            }
        })?;
        Ok(())
    }

    /// Whether the process began with SIGHUP ignored, as `nohup` begins it: then it is to outlive
    /// its terminal. If not, it is ignored from here until the listener takes it.
    #[expect(unsafe_code, reason = "what a signal does can only be asked by setting it")]
    fn is_hangup_ignored() -> bool {
        // SAFETY: no handler is installed that could run.
        let before = unsafe { signal(Signal::SIGHUP, SigHandler::SigIgn) };
        matches!(before, Ok(SigHandler::SigIgn))
    }
}

#[cfg(not(unix))]
mod by_system {
    use std::io::{Error, Result};

    /// The number of Ctrl-C's signal, as elsewhere.
    pub(crate) const INTERRUPT: u8 = 2;

    /// Calls `asked` with the number of each signal, on a thread of its own.
    pub(crate) fn listen(asked: impl Fn(u8) + Send + 'static) -> Result<()> {
        ctrlc::set_handler(move || asked(INTERRUPT)).map_err(Error::other)
    }
}

pub(super) use by_system::{INTERRUPT, listen};
