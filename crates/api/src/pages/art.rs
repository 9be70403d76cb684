//! Small pictures made here: a shore for every address and asset, a sparkline, a network's tide gauge. SVG with
//! presentation attributes only, so the content security policy needs no exception.

use std::fmt::Write as _;

use sha2::{Digest, Sha256};

/// A deterministic picture: sky, three tides, always the same for the same name. `round` for accounts.
pub(crate) fn shore(name: &str, round: bool) -> String {
    let hash = Sha256::digest(name.as_bytes());
    let hue = u32::from(hash[0]) * 360 / 256;
    let other = (hue + 25 + u32::from(hash[1]) % 70) % 360;
    let class = if round { "pic round" } else { "pic" };
    let mut svg = format!(
        "<svg class=\"{class}\" viewBox=\"0 0 32 32\" aria-hidden=\"true\">\
         <path d=\"M0 0h32v32H0z\" fill=\"hsl({hue},38%,82%)\"/>"
    );
    if hash[2] & 1 == 1 {
        let (x, y, r) = (6 + u32::from(hash[3]) % 20, 6 + u32::from(hash[4]) % 7, 2 + hash[5] % 4);
        let _ = write!(svg, "<circle cx=\"{x}\" cy=\"{y}\" r=\"{r}\" fill=\"hsl({other},60%,92%)\"/>");
    }
    for (band, light) in [(0_usize, 62_u32), (1, 46), (2, 30)] {
        let height = 9 + 7 * u32::try_from(band).unwrap_or(0) + u32::from(hash[6 + band]) % 6;
        let swell = 3 + u32::from(hash[9 + band]) % 6;
        let crest = if hash[12 + band] & 1 == 1 { height.saturating_sub(swell) } else { height + swell };
        let hue = if band == 1 { other } else { hue };
        let _ = write!(
            svg,
            "<path d=\"M0 {height}Q8 {crest} 16 {height}T32 {height}V32H0z\" fill=\"hsl({hue},42%,{light}%)\"/>"
        );
    }
    svg.push_str("</svg>");
    svg
}

/// Events per second over the last quarter of an hour, as an area.
pub(crate) fn sparkline(values: &[i64]) -> String {
    const WIDTH: i64 = 180;
    const HEIGHT: i64 = 32;
    let most = values.iter().copied().max().unwrap_or(0).max(1);
    let steps = i64::try_from(values.len().saturating_sub(1)).unwrap_or(1).max(1);
    let mut points = String::new();
    for (at, value) in (0_i64..).zip(values) {
        // Tenths of a pixel, without floats.
        let (x, y) = (at * WIDTH * 10 / steps, (HEIGHT - 2) * 10 - value * (HEIGHT - 4) * 10 / most);
        let _ = write!(points, "{}.{} {}.{} ", x / 10, x % 10, y / 10, y % 10);
    }
    if values.len() < 2 {
        points = format!("0 {y} {WIDTH} {y}", y = HEIGHT - 2);
    }
    let points = points.trim_end();
    format!(
        "<svg class=\"spark\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" preserveAspectRatio=\"none\" aria-hidden=\"true\">\
         <polygon points=\"0 {HEIGHT} {points} {WIDTH} {HEIGHT}\"/><polyline points=\"{points}\"/></svg>"
    )
}

/// Dry sand up to the tidemark, wet up to where we have read, then what the chain has and we do not.
pub(crate) fn gauge(finalized: i64, projected: i64, head: i64) -> String {
    const WIDTH: i64 = 260;
    let wet = (head.max(projected) - finalized).max(1);
    let dry = (wet / 2).max(1);
    let at = |height: i64| ((height - finalized + dry) * WIDTH / (wet + dry)).clamp(0, WIDTH);
    let (line, read) = (at(finalized), at(projected));
    format!(
        "<svg class=\"gauge\" viewBox=\"0 0 {WIDTH} 14\" preserveAspectRatio=\"none\" aria-hidden=\"true\">\
         <rect class=\"dry\" x=\"0\" y=\"5\" width=\"{line}\" height=\"4\"/>\
         <rect class=\"wet\" x=\"{line}\" y=\"5\" width=\"{}\" height=\"4\"/>\
         <rect class=\"unread\" x=\"{read}\" y=\"6\" width=\"{}\" height=\"2\"/>\
         <rect class=\"mark\" x=\"{}\" y=\"0\" width=\"2\" height=\"14\"/></svg>",
        (read - line).max(0),
        (WIDTH - read).max(0),
        (line - 1).max(0),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shore_is_deterministic_and_small() {
        assert_eq!(shore("0xabc", true), shore("0xabc", true));
        assert_ne!(shore("0xabc", true), shore("0xabd", true));
        assert!(shore("0xabc", false).len() < 520);
    }

    #[test]
    fn charts_take_any_numbers() {
        for values in [vec![], vec![0], vec![0, 0, 0], vec![1, 900, 3]] {
            assert!(sparkline(&values).starts_with("<svg"));
        }
        for (finalized, projected, head) in
            [(-1, -1, -1), (10, 10, 10), (10, 5, 100), (0, i64::from(u32::MAX), 7)]
        {
            assert!(gauge(finalized, projected, head).contains("mark"));
        }
    }
}
