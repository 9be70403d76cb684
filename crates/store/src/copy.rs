//! Rows for `copy … from stdin (format binary)`. Columns are written in the order of the copy statement;
//! one big buffer in bounded chunks, no value boxed, no statement prepared per row.

use alloy_primitives::U256;
use bytes::{BufMut, Bytes, BytesMut};
use tidemark_model::quantity::SignedQty;
use time::OffsetDateTime;
use uuid::Uuid;

/// Chunks of this size go to the server; large enough to amortise, small enough to stay in cache.
const CHUNK_BYTES: usize = 256 * 1024;

/// 2000-01-01T00:00:00Z, Postgres' epoch, in Unix microseconds.
const POSTGRES_EPOCH_MICROS: i128 = 946_684_800_000_000;

/// Signature, flags and the length of an empty extension.
const HEADER_BYTES: usize = 19;

/// Where the row that begins at `at` ends.
fn row_end(chunk: &[u8], at: usize) -> usize {
    let columns = i16::from_be_bytes([chunk[at], chunk[at + 1]]);
    let mut end = at + 2;
    for _ in 0..columns {
        let length = i32::from_be_bytes(chunk[end..end + 4].try_into().expect("four bytes"));
        end += 4 + usize::try_from(length).unwrap_or(0); // -1 is NULL and has no bytes.
    }
    end
}

/// Encoded rows. Cloning shares the full chunks.
#[derive(Clone)]
pub struct CopyBuffer {
    columns: i16,
    full: Vec<Bytes>,
    open: BytesMut,
    rows: u64,
    /// Columns still to be written of the current row; a row that is cut short is our own mistake.
    missing: i16,
}

impl CopyBuffer {
    /// For rows of `columns` columns.
    pub fn new(columns: i16) -> Self {
        // Small at first: a thousand networks with a few rows each have a dozen of these each.
        let mut open = BytesMut::with_capacity(4096);
        open.put_slice(b"PGCOPY\n\xff\r\n\0");
        open.put_i32(0); // flags
        open.put_i32(0); // header extension
        Self { columns, full: Vec::new(), open, rows: 0, missing: 0 }
    }
    /// The rows so far; none are left here.
    pub fn take(&mut self) -> Self {
        let columns = self.columns;
        std::mem::replace(self, Self::new(columns))
    }
    /// Rows so far.
    pub fn rows(&self) -> u64 {
        self.rows
    }
    /// Bytes so far.
    pub fn bytes(&self) -> usize {
        self.open.len() + self.full.iter().map(Bytes::len).sum::<usize>()
    }
    /// Begins a row; its columns follow.
    pub fn row(&mut self) -> &mut Self {
        assert_eq!(self.missing, 0, "the previous row of a COPY is not complete");
        if self.open.len() >= CHUNK_BYTES {
            let chunk = self.open.split().freeze();
            self.full.push(chunk);
            self.open.reserve(CHUNK_BYTES + 4096);
        }
        self.open.put_i16(self.columns);
        self.missing = self.columns;
        self.rows += 1;
        self
    }
    fn column(&mut self) {
        self.missing -= 1;
        assert!(self.missing >= 0, "a row of a COPY has more columns than declared");
    }
    fn put(&mut self, bytes: &[u8]) -> &mut Self {
        self.column();
        self.open.put_i32(i32::try_from(bytes.len()).expect("a column is smaller than 2 GiB"));
        self.open.put_slice(bytes);
        self
    }
    /// NULL.
    pub fn null(&mut self) -> &mut Self {
        self.column();
        self.open.put_i32(-1);
        self
    }
    /// `boolean`
    pub fn bool(&mut self, value: bool) -> &mut Self {
        self.put(&[u8::from(value)])
    }
    /// `smallint`
    pub fn i16(&mut self, value: i16) -> &mut Self {
        self.put(&value.to_be_bytes())
    }
    /// `int`
    pub fn i32(&mut self, value: i32) -> &mut Self {
        self.put(&value.to_be_bytes())
    }
    /// `bigint`
    pub fn i64(&mut self, value: i64) -> &mut Self {
        self.put(&value.to_be_bytes())
    }
    /// `bytea`
    pub fn bytea(&mut self, value: &[u8]) -> &mut Self {
        self.put(value)
    }
    /// `text`, or an enum's label. The caller has made it free of NUL (model::text::storable).
    pub fn text(&mut self, value: &str) -> &mut Self {
        self.put(value.as_bytes())
    }
    /// `uuid`
    pub fn uuid(&mut self, value: Uuid) -> &mut Self {
        self.put(value.as_bytes())
    }
    /// `jsonb`
    pub fn jsonb(&mut self, value: &serde_json::Value) -> &mut Self {
        let text = value.to_string();
        self.column();
        self.open.put_i32(i32::try_from(text.len() + 1).expect("a JSON value is smaller than 2 GiB"));
        self.open.put_u8(1); // jsonb version
        self.open.put_slice(text.as_bytes());
        self
    }
    /// `timestamptz`
    pub fn timestamp(&mut self, value: OffsetDateTime) -> &mut Self {
        let micros = value.unix_timestamp_nanos() / 1000 - POSTGRES_EPOCH_MICROS;
        self.put(&i64::try_from(micros).expect("block times lie within Postgres' calendar").to_be_bytes())
    }
    /// `numeric` from a uint256.
    pub fn u256(&mut self, value: U256) -> &mut Self {
        self.numeric(false, value)
    }
    /// `numeric` from a signed quantity.
    pub fn qty(&mut self, value: SignedQty) -> &mut Self {
        self.numeric(value.is_negative(), value.magnitude())
    }
    /// The value or NULL.
    pub fn opt<T>(&mut self, value: Option<T>, write: impl FnOnce(&mut Self, T) -> &mut Self) -> &mut Self {
        match value {
            Some(value) => write(self, value),
            None => self.null(),
        }
    }

    /// The same rows in the order of their first column, a uuid. Rows that arrive in the order of an index
    /// find the leaf they need in the processor's cache; random ones never do.
    pub fn sorted_by_leading_uuid(self) -> Self {
        let columns = self.columns;
        let chunks = self.into_data_chunks();
        let mut places = Vec::new();
        for (number, chunk) in chunks.iter().enumerate() {
            let mut at = 0;
            while at < chunk.len() {
                let key = chunk[at + 6..at + 22].try_into().expect("a uuid has sixteen bytes");
                let end = row_end(chunk, at);
                places.push((u128::from_be_bytes(key), number, at, end));
                at = end;
            }
        }
        places.sort_unstable();
        let mut sorted = Self::new(columns);
        for (_, number, from, to) in places {
            sorted.row();
            sorted.missing = 0;
            sorted.open.put_slice(&chunks[number][from + 2..to]);
        }
        sorted
    }

    /// Whole rows without header or trailer.
    fn into_data_chunks(self) -> Vec<Bytes> {
        assert_eq!(self.missing, 0, "the last row of a COPY is not complete");
        let mut chunks = self.full;
        chunks.push(self.open.freeze());
        chunks[0] = chunks[0].slice(HEADER_BYTES..);
        chunks
    }

    /// Postgres' NUMERIC: base-10000 digits, most significant first, trailing zero digits left out.
    fn numeric(&mut self, negative: bool, value: U256) -> &mut Self {
        let mut groups = [0_u16; 20]; // 10^80 > 2^256
        let mut at = groups.len();
        if let Ok(mut small) = u64::try_from(value) {
            while small > 0 {
                at -= 1;
                groups[at] = u16::try_from(small % 10_000).expect("below 10000");
                small /= 10_000;
            }
        } else {
            let base = U256::from(10_000_000_000_000_000_u64);
            let mut rest = value;
            while !rest.is_zero() {
                let (quotient, remainder) = rest.div_rem(base);
                let mut four = u64::try_from(remainder).expect("below 10^16");
                for _ in 0..4 {
                    at -= 1;
                    groups[at] = u16::try_from(four % 10_000).expect("below 10000");
                    four /= 10_000;
                }
                rest = quotient;
            }
            while groups[at] == 0 {
                at += 1;
            }
        }
        let digits = &groups[at..];
        let weight = i16::try_from(digits.len()).expect("at most 20") - 1;
        let kept = digits.iter().rposition(|digit| *digit != 0).map_or(0, |last| last + 1);
        self.column();
        self.open.put_i32(i32::try_from(8 + kept * 2).expect("at most 48"));
        self.open.put_i16(i16::try_from(kept).expect("at most 20"));
        self.open.put_i16(if kept == 0 { 0 } else { weight });
        self.open.put_u16(if negative { 0x4000 } else { 0 });
        self.open.put_u16(0); // scale
        for digit in &digits[..kept] {
            self.open.put_u16(*digit);
        }
        self
    }

    pub(crate) fn into_chunks(mut self) -> Vec<Bytes> {
        assert_eq!(self.missing, 0, "the last row of a COPY is not complete");
        self.open.put_i16(-1);
        self.full.push(self.open.freeze());
        self.full
    }
}
