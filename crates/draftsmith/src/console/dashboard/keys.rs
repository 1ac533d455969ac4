//! Who has the terminal's keys, and what Ctrl-C means while the dashboard reads them.

#[cfg(unix)]
mod by_system {
    use std::io::stdin;
    use std::thread::sleep;
    use std::time::Duration;

    use nix::libc::_POSIX_VDISABLE;
    use nix::sys::termios::{LocalFlags, SetArg, SpecialCharacterIndices, tcgetattr, tcsetattr};
    use nix::unistd::{getpgrp, tcgetpgrp};

    /// How often, and how long each time, the dashboard's raw mode is waited for.
    const WAITS: (u32, Duration) = (200, Duration::from_millis(5));

    /// Whether keys go to this job: one in the background would be suspended when it reads them.
    pub(crate) fn are_ours() -> bool {
        tcgetpgrp(stdin()) == Ok(getpgrp())
    }

    /// Whether there will be no more keys: what stdin is was closed, or is no terminal.
    pub(crate) fn are_gone() -> bool {
        tcgetattr(stdin()).is_err()
    }

    /// Lets Ctrl-C interrupt in raw mode too, as soon as that is on. Ctrl-Z and Ctrl-\ stay keys:
    /// they would leave the terminal in it.
    pub(crate) fn restore_interrupt() {
        for _ in 0..WAITS.0 {
            match tcgetattr(stdin()) {
                Ok(mut mode) if !mode.local_flags.contains(LocalFlags::ICANON) => {
                    mode.local_flags.insert(LocalFlags::ISIG);
                    for key in [SpecialCharacterIndices::VSUSP, SpecialCharacterIndices::VQUIT] {
                        mode.control_chars[key as usize] = _POSIX_VDISABLE;
                    }
                    // Where it cannot be set, `q` still stops the training.
                    let _ = tcsetattr(stdin(), SetArg::TCSANOW, &mode);
                    return;
                }
                _ => sleep(WAITS.1),
            }
        }
    }
}

#[cfg(not(unix))]
mod by_system {
    /// Whether keys go to this job: there are no others.
    pub(crate) fn are_ours() -> bool {
        true
    }

    /// Whether there will be no more keys: what a closed terminal is like is not known here.
    pub(crate) fn are_gone() -> bool {
        false
    }

    /// Does nothing: Ctrl-C stays a key here, and `q` stops the training.
    pub(crate) fn restore_interrupt() {}
}

pub(super) use by_system::{are_gone, are_ours, restore_interrupt};
